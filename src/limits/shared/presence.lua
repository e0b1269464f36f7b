-- The proxies that share the limits, by when they were last heard of, in milliseconds of the store's clock.
-- KEYS: that set.
-- ARGV: this proxy; 1, or 0 when it leaves; milliseconds after which a proxy is gone.
-- Returns how many there are, and nothing.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[3]))
if ARGV[2] == '1' then
  redis.call('ZADD', KEYS[1], now, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], 3600000)
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return { redis.call('ZCARD', KEYS[1]), 0 }
