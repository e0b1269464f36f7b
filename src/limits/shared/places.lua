-- Places of the waiting pops of one cluster. A proxy that is not heard of any more holds none.
-- KEYS: proxy -> places; the proxies by when they were last heard of, in milliseconds.
-- ARGV: the proxy; the places it may take without another word; its pops that wait with the requests that would;
--   places it would like; the cap; proxies;
--   milliseconds after which a proxy is gone.
-- Returns the places this proxy has now, and those of the others.
local KEEP_MS = 3600000
local function number(at) return tonumber(ARGV[at]) end

local time = redis.call('TIME')
local line = time[1] * 1000 + math.floor(time[2] / 1000) - number(7)
local others = 0
local held = redis.call('HGETALL', KEYS[1])
for at = 1, #held, 2 do
  if held[at] ~= ARGV[1] then
    local heard = redis.call('ZSCORE', KEYS[2], held[at])
    if heard and tonumber(heard) > line then
      others = others + tonumber(held[at + 1])
    else
      redis.call('HDEL', KEYS[1], held[at])
    end
  end
end

local usable, needed, liked, cap, proxies = number(2), number(3), number(4), number(5), number(6)
local room = math.max(cap - others, 0)
local spare = math.floor(math.max(room - needed, 0) / proxies)
local granted = math.min(room, needed + math.min(math.max(liked - needed, 0), spare))
-- Pops that wait are facts, whatever the cap says by now, and more may wait before this is heard.
granted = math.max(granted, usable)
if granted > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], granted)
  redis.call('PEXPIRE', KEYS[1], KEEP_MS)
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return { granted, others }
