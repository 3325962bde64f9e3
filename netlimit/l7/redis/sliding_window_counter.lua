-- A string "window current previous", with a TTL to the end of the window after: the current one is the previous then.
-- Times are in ticks (of so many microseconds), so that products of hits and times are whole numbers in a double.
-- ARGV, for each key: seconds of a window, a tick, hits admitted, hits, whether they count though they are refused,
-- and the window in which they came (0: this one; in the previous one they count as such, in older ones not).
-- Replies for each key: admitted, current, previous, ticks to the window's end.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 6 * i - 5
  local tick, ceiling, hits, charge = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), ARGV[at + 4]
  local period = ARGV[at] * 1000000 / tick
  local ticks = math.floor(now / tick)
  local window, current, previous = math.floor(ticks / period), 0, 0
  local kept = redis.call('GET', key)
  if kept then
    local of, newer, older = string.match(kept, '(%d+) (%d+) (%d+)')
    if tonumber(of) == window then
      current, previous = tonumber(newer), tonumber(older)
    elseif of + 1 == window then
      previous = tonumber(newer)
    end
  end
  local rest = (window + 1) * period - ticks
  local life = math.ceil((rest + period) * tick / 1000)
  local came = tonumber(ARGV[at + 5])
  if came > 0 and came < window then
    if came + 1 == window then
      previous = previous + hits
      redis.call('SET', key, string.format('%.0f %.0f %.0f', window, current, previous), 'PX', life)
    end
    hits = 0
  end
  local admitted = current + math.floor(previous * rest / period) + math.max(hits, 1) <= ceiling
  if hits > 0 and (admitted or charge == '1') then
    current = current + hits
    redis.call('SET', key, string.format('%.0f %.0f %.0f', window, current, previous), 'PX', life)
  end
  reply[#reply + 1] = admitted and 1 or 0
  reply[#reply + 1] = current
  reply[#reply + 1] = previous
  reply[#reply + 1] = rest
end
return reply
