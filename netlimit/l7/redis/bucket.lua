-- Token bucket, leaky bucket and GCRA: a string "used since cost". `used` is what a full bucket lacks, in units of which
-- a hit costs `cost` and every tick gives `given` back; `since` (microseconds) is when that was so. When the clock
-- has been set back, it is so from now on. Costs differ when the limit's amount has changed: what is used goes on in the
-- new ones, rounded up, or an amount that goes up and down would give hits anew.
-- ARGV, for each key: a tick in microseconds, given, cost, what a full bucket holds, hits tolerated beyond that, hits,
-- whether they count though they are refused, what is used at most, and what may be used before one that is to wait until
-- that is given back. Replies for each key: admitted, used before.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 9 * i - 8
  local tick, given, cost, full = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local slack, hits, charge, most = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), ARGV[at + 6], tonumber(ARGV[at + 7])
  local longest = tonumber(ARGV[at + 8])
  local moment = now - now % tick
  local used, changed = 0, false
  local kept = redis.call('GET', key)
  if kept then
    local before, since, unit = string.match(kept, '(%d+) (%d+) (%d+)')
    used = tonumber(before)
    if tonumber(unit) ~= cost then
      used = math.ceil(used / unit * cost)
    end
    local passed = math.min(math.floor(math.max(moment - since, 0) / tick), math.ceil(used / math.max(given, 1)))
    used = math.max(used - passed * given, 0)
    changed = tonumber(since) > moment or used > most
    used = math.min(used, most)
  end
  local admitted = used + math.max(hits, 1) * cost <= full + slack * cost and (hits == 0 or used <= longest)
  local counted = (admitted or charge == '1') and hits or 0
  local after = math.min(used + counted * cost, most)
  if (counted > 0 or changed) and after > 0 then
    local life = math.min(math.ceil(after / math.max(given, 1) * tick / 1000), 1e15)
    redis.call('SET', key, string.format('%.0f %.0f %.0f', after, moment, cost), 'PX', life)
  end
  reply[#reply + 1] = admitted and 1 or 0
  reply[#reply + 1] = used
end
return reply
