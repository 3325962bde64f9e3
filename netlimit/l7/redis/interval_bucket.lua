-- A token bucket that is filled when a unit begins: a string "used unit": tokens that a full bucket lacked in that unit,
-- which are numbered since 1970.
-- ARGV, for each key: seconds of a unit, tokens given in it, what a full bucket holds, tokens tolerated beyond that, hits,
-- whether they count though they are refused, tokens used at most. Replies for each key: admitted, used before,
-- microseconds to the next unit.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 7 * i - 6
  local period, given, full = ARGV[at] * 1000000, tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local slack, hits, charge, most = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), ARGV[at + 5], tonumber(ARGV[at + 6])
  local unit, used, changed = math.floor(now / period), 0, false
  local rest = (unit + 1) * period - now
  local kept = redis.call('GET', key)
  if kept then
    local before, since = string.match(kept, '(%d+) (%d+)')
    local passed = math.min(math.max(unit - since, 0), math.ceil(before / math.max(given, 1)))
    used = math.max(before - passed * given, 0)
    changed = tonumber(since) > unit or used > most
    used = math.min(used, most)
  end
  local admitted = used + math.max(hits, 1) <= full + slack
  local counted = (admitted or charge == '1') and hits or 0
  local after = math.min(used + counted, most)
  if (counted > 0 or changed) and after > 0 then
    local units = math.ceil(after / math.max(given, 1)) - 1
    local life = math.min(math.ceil((units * period + rest) / 1000), 1e15)
    redis.call('SET', key, string.format('%.0f %.0f', after, unit), 'PX', life)
  end
  reply[#reply + 1] = admitted and 1 or 0
  reply[#reply + 1] = used
  reply[#reply + 1] = rest
end
return reply
