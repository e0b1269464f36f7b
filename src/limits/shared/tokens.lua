-- One bucket of one cluster, for all proxies. Levels are millionths of a token, times are microseconds of the
-- store's own clock: a rate of r tokens a second adds exactly r millionths each microsecond, and all stays below
-- 2^53, so nothing is rounded.
-- KEYS: the bucket.
-- ARGV: tokens a second, burst; tokens handed back; tokens owed for deliveries, the deepest debt they may make;
--   tokens spent without the store, the deepest debt they may make; of the requests that wait: tokens of all, of the smallest;
--   tokens the proxy holds, tokens it would like beyond; proxies.
-- Returns the whole tokens granted, and the level afterwards.
local MILLION = 1000000
local KEEP_MS = 600000
local function number(at) return tonumber(ARGV[at]) end

local time = redis.call('TIME')
local now = time[1] * MILLION + time[2]
local rate, burst = number(1), number(2)
local capacity = burst * MILLION

-- What time has passed refills at the rate that was in force; a higher burst brings no tokens, a lower one takes them.
local was = redis.call('HMGET', KEYS[1], 'level', 'at', 'rate', 'burst')
local level = capacity
if was[1] then
  local at = tonumber(was[2])
  local refilled = tonumber(was[1]) + tonumber(was[3]) * math.max(now - at, 0)
  level = math.min(refilled, tonumber(was[4]) * MILLION, capacity)
  now = math.max(now, at)
end
level = math.min(level + number(3) * MILLION, capacity)
-- What proxies spent while they could not ask is gone.
level = math.min(level, math.max(level - number(6) * MILLION, number(7) * MILLION))
local owed, deepest = number(4), number(5) * MILLION
if owed > 0 and level > deepest then level = math.max(level - owed * MILLION, deepest) end

local all, smallest, held, more, proxies = number(8), number(9), number(10), number(11), number(12)
local granted = 0
if rate > 0 and burst > 0 then
  local whole = math.max(math.floor(level / MILLION), 0)
  local share = math.min(more, math.floor(whole / proxies))
  if smallest == 0 then
    granted = share
  elseif level + held * MILLION >= math.min(smallest, burst) * MILLION then
    -- More than the burst is granted when the bucket is full, and leaves a debt.
    granted = math.max(smallest - held, math.min(whole, math.max(all - held, share)), 0)
  end
end
level = level - granted * MILLION

local function text(n) return string.format('%.0f', n) end
redis.call('HSET', KEYS[1], 'level', text(level), 'at', text(now), 'rate', ARGV[1], 'burst', ARGV[2])
local full_in = rate > 0 and (capacity - level) / rate / 1000 or 0
redis.call('PEXPIRE', KEYS[1], text(KEEP_MS + full_in))
return { granted, level }
