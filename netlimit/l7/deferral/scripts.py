"""What is done in Redis at once, by scripts in Lua."""

from __future__ import annotations

_COUNT = """
local function count(keys, bytes, shares, key, network, size, others)
    redis.call('HINCRBY', keys, key, 1)
    redis.call('INCRBY', bytes, size)
    redis.call('HINCRBY', shares, 'bytes of key ' .. key, size)
    redis.call('HINCRBY', shares, 'requests of network ' .. network, 1)
    redis.call('HINCRBY', shares, 'bytes of network ' .. network, size)
    local part = ' of network ' .. network .. ' of key ' .. key -- of a line that networks share
    redis.call('HINCRBY', shares, 'requests' .. part, 1)
    redis.call('HINCRBY', shares, 'bytes' .. part, size)
    redis.call('HINCRBY', shares, 'requests under ' .. others .. ' of key ' .. key, 1)
end
"""
_DISCOUNT = """
local function give_back(fields, name, amount)
    local left = redis.call('HINCRBY', fields, name, 0 - amount) -- which is never -0: Redis takes none
    if left <= 0 then redis.call('HDEL', fields, name) end
end
local function discount(stream, keys, bytes, shares, key, network, size, others)
    give_back(keys, key, 1)
    redis.call('DECRBY', bytes, size)
    if network then -- else a former version has put it, and has not counted what shares it takes
        give_back(shares, 'bytes of key ' .. key, size)
        give_back(shares, 'requests of network ' .. network, 1)
        give_back(shares, 'bytes of network ' .. network, size)
        local part = ' of network ' .. network .. ' of key ' .. key
        give_back(shares, 'requests' .. part, 1)
        give_back(shares, 'bytes' .. part, size)
        give_back(shares, 'requests under ' .. others .. ' of key ' .. key, 1)
    end
    if redis.call('XLEN', stream) == 0 then redis.call('DEL', keys, bytes, shares) end -- such a version gives none back
end
"""
_WEIGH = """
local function weigh(stream, keys, bytes, shares, key, network)
    local function read(fields, name) return tonumber(redis.call('HGET', fields, name) or 0) end
    local part = ' of network ' .. network .. ' of key ' .. key
    return {redis.call('XLEN', stream), tonumber(redis.call('GET', bytes) or 0),
        read(keys, key), read(shares, 'bytes of key ' .. key),
        read(shares, 'requests of network ' .. network), read(shares, 'bytes of network ' .. network),
        read(shares, 'requests' .. part), read(shares, 'bytes' .. part)}
end
"""
WEIGH = f"{_WEIGH} return weigh(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1], ARGV[2])"
PUT = f"""{_COUNT}{_WEIGH}
if redis.call('EXISTS', KEYS[4]) == 1 then return 1 end -- asked again: its answer was lost with a connection
local size = #ARGV[8] + #ARGV[9]
local requests, bytes, of_key, bytes_of_key, of_network, bytes_of_network, of_both, bytes_of_both = unpack(
    weigh(KEYS[1], KEYS[2], KEYS[3], KEYS[5], ARGV[4], ARGV[10]))
if ARGV[13] ~= '1' then of_both, bytes_of_both = 0, 0 end
if of_both >= tonumber(ARGV[2]) - of_key or bytes_of_both + size > tonumber(ARGV[11]) - bytes_of_key
    or of_network >= tonumber(ARGV[1]) - requests
    or bytes_of_network + size > tonumber(ARGV[3]) - bytes then return 0 end
redis.call('HSET', KEYS[4], 'state', 'waiting', 'key', ARGV[4], 'accepted', ARGV[6], 'expires', ARGV[7], 'tries', 0,
    'size', size, 'head', ARGV[8], 'body', ARGV[9], 'network', ARGV[10], 'others', ARGV[12])
count(KEYS[2], KEYS[3], KEYS[5], ARGV[4], ARGV[10], size, ARGV[12])
local entry = redis.call('XADD', KEYS[1], '*', 'id', ARGV[5], 'key', ARGV[4], 'network', ARGV[10], 'size', size,
    'others', ARGV[12])
redis.call('HSET', KEYS[4], 'entry', entry)
return 1
"""
WITHDRAW = f"""{_DISCOUNT}
local state, tries, entry, key, network, size, others = unpack(
    redis.call('HMGET', KEYS[4], 'state', 'tries', 'entry', 'key', 'network', 'size', 'others'))
if not state or redis.call('HGET', KEYS[4], 'reason') == ARGV[1] then return 1 end -- asked again
if state ~= 'waiting' or tries ~= '0' or not entry or redis.call('XDEL', KEYS[1], entry) == 0 then return 0 end
redis.call('XACK', KEYS[1], 'replay', entry)
discount(KEYS[1], KEYS[2], KEYS[3], KEYS[5], key, network, tonumber(size), others)
redis.call('HSET', KEYS[4], 'state', 'failed', 'reason', ARGV[1])
redis.call('HDEL', KEYS[4], 'head', 'body')
redis.call('EXPIRE', KEYS[4], ARGV[2]) -- who has read the entry already takes it for lost otherwise
return 1
"""
BEHIND = """
local waiting = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0)
local function count(others)
    return tonumber(redis.call('HGET', KEYS[2], 'requests under ' .. others .. ' of key ' .. ARGV[1]) or 0)
end
if waiting <= 0 then return 0 end
if count(ARGV[2]) > 0 then return 1 end
for _, others in ipairs(redis.call('ZRANGE', KEYS[3], '(' .. ARGV[3], '+inf', 'BYSCORE')) do
    waiting = waiting - count(others)
end
return waiting > 0 and 1 or 0
"""
STAND_ASIDE = """
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""
LOCK = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return owner and 1 or 2
"""
KEEP_LOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"
RESTORE = """
local function add(id, ...)
    local name, entry = ARGV[1] .. id, redis.call('XADD', KEYS[1], '*', 'id', id, ...)
    if redis.call('TYPE', name).ok == 'hash' then redis.call('HSET', name, 'entry', entry) end
end
local present = redis.call('XRANGE', KEYS[1], '-', '+') -- what was put since, behind what was lost
local known, lost = {}, 0
for _, entry in ipairs(present) do known[entry[2][2]] = true end
redis.call('DEL', KEYS[1])
for position = 2, #ARGV do
    local id = ARGV[position]
    local state, key, network, size, others = unpack(
        redis.call('HMGET', ARGV[1] .. id, 'state', 'key', 'network', 'size', 'others'))
    if state == 'waiting' and key and not known[id] then
        add(id, 'key', key, 'network', network or '', 'size', size or 0, 'others', others or '')
        lost = lost + 1
    end
end
for _, entry in ipairs(present) do add(select(2, unpack(entry[2]))) end
redis.call('XGROUP', 'CREATE', KEYS[1], 'replay', '0', 'MKSTREAM') -- last: it says that all this has been done
return lost
"""
RECOUNT = f"""{_COUNT}
local known, waiting = 0, redis.call('XLEN', KEYS[1])
for _, of_key in ipairs(redis.call('HVALS', KEYS[2])) do known = known + (tonumber(of_key) or waiting + 1) end
local complete = redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[4]) == (waiting == 0 and 0 or 3)
if known == waiting and complete then return 0 end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
    local fields = {{}}
    for position = 1, #entry[2], 2 do fields[entry[2][position]] = entry[2][position + 1] end
    if fields.key then
        local size = tonumber(fields.size) or 0
        count(KEYS[2], KEYS[3], KEYS[4], fields.key, fields.network or '', size, fields.others or '')
    end
end
return known == waiting and 0 or 1
"""
CLAIM = """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return end
local head, body, tries = unpack(redis.call('HMGET', KEYS[1], 'head', 'body', 'tries'))
if not head then return end
tries = (tonumber(tries) or 0) + 1
redis.call('HSET', KEYS[1], 'tries', tries)
redis.call('ZREM', KEYS[2], ARGV[1])
return {tries, head, body}
"""
MOVE = f"""{_COUNT}{_DISCOUNT}
if redis.call('GET', KEYS[6]) ~= ARGV[1] then return 0 end -- others replay
local state, key, network, size, others = unpack(
    redis.call('HMGET', KEYS[4], 'state', 'key', 'network', 'size', 'others'))
if state ~= 'waiting' or redis.call('XDEL', KEYS[1], ARGV[2]) == 0 then return 0 end
redis.call('XACK', KEYS[1], 'replay', ARGV[2])
discount(KEYS[1], KEYS[2], KEYS[3], KEYS[5], key, network, tonumber(size), others or '')
count(KEYS[2], KEYS[3], KEYS[5], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
local entry = redis.call('XADD', KEYS[1], '*', 'id', ARGV[3], 'key', ARGV[4], 'network', ARGV[5], 'size', ARGV[6],
    'others', ARGV[7])
redis.call('HSET', KEYS[4], 'key', ARGV[4], 'network', ARGV[5], 'size', ARGV[6], 'others', ARGV[7], 'head', ARGV[8],
    'entry', entry)
return 1
"""
FORGET_TRY = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'tries', -1) end"
FINISH = f"""{_DISCOUNT}
local function remember(ended, id, weight, room) -- each by what had ended before it, and '' by all: the oldest go
    local before = tonumber(redis.call('ZSCORE', ended, '') or 0)
    local all = before + weight
    redis.call('ZADD', ended, string.format('%.0f', before), id, string.format('%.0f', all), '')
    local past = string.format('(%.0f', all - room)
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', ended, '-inf', past)) do
        if redis.call('HGET', ARGV[10] .. old, 'state') ~= 'waiting' then redis.call('DEL', ARGV[10] .. old) end
    end
    redis.call('ZREMRANGEBYSCORE', ended, '-inf', past)
    redis.call('EXPIRE', ended, ARGV[7])
end
redis.call('XACK', KEYS[1], 'replay', ARGV[1])
if redis.call('TYPE', KEYS[4]).ok ~= 'hash' then redis.call('DEL', KEYS[4]) end -- nothing that was put here
local size, network, state = unpack(redis.call('HMGET', KEYS[4], 'size', 'network', 'state'))
local present = redis.call('XDEL', KEYS[1], ARGV[1])
if present == 1 then
    if not state then size, network = ARGV[8], ARGV[9] ~= '' and ARGV[9] end -- the record is lost
    discount(KEYS[1], KEYS[2], KEYS[3], KEYS[5], ARGV[2], network, tonumber(size) or 0, ARGV[14])
end
if state == 'waiting' then
    redis.call('HSET', KEYS[4], 'state', ARGV[3], 'reply', ARGV[4], 'body', ARGV[5], 'reason', ARGV[6])
    redis.call('HDEL', KEYS[4], 'head')
    redis.call('EXPIRE', KEYS[4], ARGV[7])
    local most, most_bytes = tonumber(ARGV[12]), tonumber(ARGV[13])
    local length = #ARGV[2] + #ARGV[4] + #ARGV[5] + #ARGV[6]
    remember(KEYS[6], ARGV[11], math.max(length * most, most_bytes), most * most_bytes)
end
return {{present, state}}
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
