-- Ends or renews leases of such a set.
-- ARGV, for each key: seconds that a lease lasts from now (0: it ends), its hits, its name. Replies for each key: how many
-- entries were found.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 3 * i - 2
  local period, hits, lease = ARGV[at] * 1000000, tonumber(ARGV[at + 1]), ARGV[at + 2]
  local found = 0
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  for part = 0, hits - 1 do
    local name = part == 0 and lease or string.format('%s/%.0f', lease, part)
    if period == 0 then
      found = found + redis.call('ZREM', key, name)
    elseif redis.call('ZSCORE', key, name) then
      redis.call('ZADD', key, now + period, name)
      found = found + 1
    end
  end
  if period > 0 and found > 0 then
    redis.call('PEXPIRE', key, period / 1000)
  end
  reply[#reply + 1] = found
end
return reply
