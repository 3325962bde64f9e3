-- A sorted set: the leases of requests in flight, scored by when they end (microseconds). A lease of several hits is as
-- many entries, of which the first bears its name.
-- ARGV, for each key: seconds that a lease lasts, leases at once, hits, the lease's name.
-- Replies for each key: admitted, leases now, microseconds until so many have ended that as many hits fit again,
-- microseconds until the last one has.
local reply = {}
for i, key in ipairs(KEYS) do
  local at = 4 * i - 3
  local period, ceiling, hits, lease = ARGV[at] * 1000000, tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), ARGV[at + 3]
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  -- What would last longer than a lease does: leases were longer before, or the clock has been set back.
  for _, late in ipairs(redis.call('ZRANGE', key, string.format('(%.0f', now + period), '+inf', 'BYSCORE')) do
    redis.call('ZADD', key, now + period, late)
  end
  local size = redis.call('ZCARD', key)
  local weight = math.max(hits, 1)
  local admitted = size + weight <= ceiling
  if hits > 0 and admitted then
    redis.call('ZADD', key, now + period, lease)
    for part = 1, hits - 1 do
      redis.call('ZADD', key, now + period, string.format('%s/%.0f', lease, part))
    end
    redis.call('PEXPIRE', key, period / 1000)
    size = redis.call('ZCARD', key)
  end
  local over, wait, reset = size + weight - ceiling, 0, 0
  if over > 0 and over <= size then
    wait = redis.call('ZRANGE', key, over - 1, over - 1, 'WITHSCORES')[2] - now
  end
  if size > 0 then
    reset = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] - now
  end
  reply[#reply + 1] = admitted and 1 or 0
  reply[#reply + 1] = size
  reply[#reply + 1] = wait
  reply[#reply + 1] = reset
end
return reply
