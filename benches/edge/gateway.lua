-- What our proxy does, in nginx: host to cluster, key to cluster, a rate by cluster, headers that a client may not
-- say. It does not look into bodies and meters nothing.

local ffi = require "ffi"

ffi.cdef [[
unsigned char *SHA256(const unsigned char *text, size_t length, unsigned char *digest);
]]

local RATE = 1000000
local REMOVED = {
    cookie = true, forwarded = true, ["x-real-ip"] = true, ["proxy-authorization"] = true, te = true, trailer = true,
}

local gateway = {}
-- Host to tenant, and the 32 bytes of a digest to tenant.
local hosts, keys = {}, {}
local digest = ffi.new("unsigned char[32]")

function gateway.load(folder)
    for line in io.lines(folder .. "/hosts.map") do
        local host, tenant = line:match("^(%S+) (%S+)$")
        hosts[host] = tenant
    end
    for line in io.lines(folder .. "/keys.map") do
        local hex, tenant = line:match("^(%S+) (%S+)$")
        keys[hex:gsub("..", function(byte) return string.char(tonumber(byte, 16)) end)] = tenant
    end
end

local function refuse(status, code)
    local text = '{"error":"' .. code .. '","code":"' .. code .. '"}'
    ngx.status = status
    ngx.header["content-type"] = "application/json"
    ngx.header["content-length"] = #text
    ngx.print(text)
    return ngx.exit(status)
end

function gateway.admit()
    local var = ngx.var
    local path = var.uri
    if path:sub(1, 5) ~= "/api/" and path:sub(1, 9) ~= "/streams/" and path:sub(1, 7) ~= "/health" then
        return refuse(404, "not_found")
    end
    local tenant = hosts[var.host]
    if not tenant then
        return refuse(421, "unknown_cluster")
    end
    local credential = var.http_authorization
    if not credential or credential:sub(1, 7) ~= "Bearer " then
        return refuse(401, "unauthorized")
    end
    local key = credential:sub(8)
    ffi.C.SHA256(key, #key, digest)
    local holder = keys[ffi.string(digest, 32)]
    if not holder then
        return refuse(401, "unauthorized")
    end
    if holder ~= tenant then
        return refuse(403, "forbidden")
    end
    local count = ngx.shared.rates:incr(tenant .. math.floor(ngx.now()), 1, 0, 2)
    if not count or count > RATE then
        return refuse(429, "rate_limited")
    end
    for name in pairs(ngx.req.get_headers()) do
        if REMOVED[name] or name:sub(1, 8) == "x-queen-" or name:sub(1, 12) == "x-forwarded-" then
            ngx.req.clear_header(name)
        end
    end
    var.tenant = tenant
    var.left = RATE - count
end

return gateway
