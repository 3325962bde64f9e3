-- A string "window count". Windows are numbered since 1970, so one that is over counts nothing, whatever its key's TTL.
-- ARGV, for each key: seconds of a window, hits admitted in it, hits, whether they count though they are refused,
-- and the window in which they came (0: this one; in one that is over they make no difference).
-- Replies for each key: admitted, the count now, microseconds to the window's end.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 5 * i - 4
  local period, ceiling, hits, charge = ARGV[at] * 1000000, tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), ARGV[at + 3]
  local window, count = math.floor(now / period), 0
  local kept = redis.call('GET', key)
  if kept then
    local of, number = string.match(kept, '(%d+) (%d+)')
    if tonumber(of) == window then
      count = tonumber(number)
    end
  end
  local came = tonumber(ARGV[at + 4])
  if came > 0 and came < window then
    hits = 0
  end
  local rest = (window + 1) * period - now
  local admitted = count + math.max(hits, 1) <= ceiling
  if hits > 0 and (admitted or charge == '1') then
    count = count + hits
    redis.call('SET', key, string.format('%.0f %.0f', window, count), 'PX', math.ceil(rest / 1000))
  end
  reply[#reply + 1] = admitted and 1 or 0
  reply[#reply + 1] = count
  reply[#reply + 1] = rest
end
return reply
