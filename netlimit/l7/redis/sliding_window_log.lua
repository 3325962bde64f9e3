-- A sorted set: an entry for each hit, scored by its time (microseconds). Its name is the time and, of hits of the same
-- microsecond, a number, so that none takes another's place.
-- ARGV, for each key: seconds of the window, hits admitted in it, hits, whether they count though they are refused, how
-- many entries are kept, and how many one request adds at most: one that is heavier is not admitted.
-- Replies for each key: admitted, entries now, microseconds until so many have left the window that as many hits fit
-- again, microseconds until the newest has.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 6 * i - 5
  local period, ceiling, hits, charge = ARGV[at] * 1000000, tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), ARGV[at + 3]
  local most, heaviest = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - period)
  local newest = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')
  if newest[1] and tonumber(newest[2]) > now then -- the clock has been set back
    redis.call('ZREMRANGEBYSCORE', key, string.format('(%.0f', now), '+inf')
    newest = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')
  end
  local size = redis.call('ZCARD', key)
  local admitted = size + math.max(hits, 1) <= ceiling and hits <= heaviest
  if hits > 0 and (admitted or charge == '1') then
    local number = 0
    if newest[1] and tonumber(newest[2]) == now then
      number = string.match(newest[1], ':(%d+)') + 1
    end
    local added = math.min(hits, most, heaviest)
    local last, entries = number + added - 1, {}
    for n = number, last do
      entries[#entries + 1] = now
      entries[#entries + 1] = string.format('%.0f:%015.0f', now, n)
      if #entries == 2000 or n == last then -- Lua passes on some thousands of values at most
        redis.call('ZADD', key, unpack(entries))
        entries = {}
      end
    end
    redis.call('PEXPIRE', key, period / 1000)
    size = size + added
    if size > most then
      redis.call('ZREMRANGEBYRANK', key, 0, -most - 1)
      size = most
    end
    newest[2] = now
  end
  local excess, wait = size + math.max(hits, 1) - ceiling, 0
  if excess > 0 and excess <= size then
    wait = redis.call('ZRANGE', key, excess - 1, excess - 1, 'WITHSCORES')[2] + period - now
  end
  reply[#reply + 1] = admitted and 1 or 0
  reply[#reply + 1] = size
  reply[#reply + 1] = wait
  reply[#reply + 1] = size > 0 and newest[2] + period - now or 0
end
return reply
