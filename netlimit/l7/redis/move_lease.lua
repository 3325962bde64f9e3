-- Ends or renews leases of such a set.
-- ARGV, for each key: seconds that a lease lasts from now (0: it ends), whether one that has ended is taken anew,
-- its hits, its name. Replies for each key: how many entries were found.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 4 * i - 3
  local period, anew, hits, lease = ARGV[at] * 1000000, ARGV[at + 1] == '1', tonumber(ARGV[at + 2]), ARGV[at + 3]
  local found = 0
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  for part = 0, hits - 1 do
    local name = part == 0 and lease or string.format('%s/%.0f', lease, part)
    local there = redis.call('ZSCORE', key, name)
    if there then
      found = found + 1
    end
    if period == 0 then
      redis.call('ZREM', key, name)
    elseif there or anew then
      redis.call('ZADD', key, now + period, name)
    end
  end
  if period > 0 and (found > 0 or anew) then
    local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] -- of a limiter that knows a longer lease, perhaps
    redis.call('PEXPIRE', key, math.ceil((last - now) / 1000))
  end
  reply[#reply + 1] = found
end
return reply
