-- For haproxy.cfg: asks netlimit whether a request may pass.
local question = "/v1/auth?domain=web&key=remote_address&key=remote_address,path&deny=429"
local longest = 35 -- seconds: more than the longest `max_wait` of a rule
local open = true -- whether everything passes without the limiter

local gone = 3 -- seconds: the limiter is gone if HAProxy's checks say so, and it has answered nobody for so long
local patience = 5 -- seconds: one that is there and does not answer is asked again for so long
local answered = 0 -- when it has answered last

local most = 500 -- questions at once: what finds no place is refused
local crowd, share = 100, 20 -- from so many on, who has sent more than his share within a second is refused
local asked = 0 -- places taken
local left, counted = 0, 0 -- how many of them for clients that have hung up, and since which second

local function now()
    local time = core.now()
    return time.sec + time.usec / 1000000
end

-- The place of a question. When its client hangs up, HAProxy looks through all that scripts hold, to collect what it
-- has left: with thousands of questions it comes to nothing else. So places are few, and one left so counts as five for
-- up to a second.
local place = {
    __gc = function(taken)
        asked, left, taken.number = asked + 4 * taken.number, left + 5 * taken.number, 0
    end,
}

local function take_place()
    asked = asked + 1
    return setmetatable({ number = 1 }, place)
end

local function give_back(taken)
    asked, taken.number = asked - taken.number, 0
end

local function has_room(txn)
    local second = core.now().sec
    if second ~= counted then
        if asked >= crowd then
            collectgarbage() -- HAProxy does not, for clients that hang up while their question waits to be asked again
        end
        asked, left, counted = asked - left, 0, second
    end
    return asked < crowd or (asked < most and (tonumber(txn.f:sc_http_req_rate(0)) or 0) <= share)
end

-- Whether the client has hung up before anything was asked. (What takes in no more may be full, too, with more in it.)
local function is_gone(txn)
    return not txn.req:may_recv() and txn.req:input() < 8192
end

-- The answer in parts: status, fields (by name, each with all its values) and body; nothing of one that is no answer.
local function read(text)
    local head, body = text:match("^(.-\r\n)\r\n(.*)$")
    if not head then
        return {}
    end
    local headers = {}
    for name, value in head:gmatch("\r\n([^:\r]+):[ \t]*([^\r]*)") do
        name = name:lower()
        headers[name] = headers[name] or {}
        table.insert(headers[name], value)
    end
    return { status = tonumber(head:match("^HTTP/1%.%d (%d+)")), headers = headers, body = body }
end

-- Not by core.httpclient(), which goes on to ask for a client that has hung up, and keeps its place in the line.
local function ask(txn)
    local target = txn.sf:pathq() -- the path that goes on: what `:authority` says is no part of it, whatever is in it
    if target == "" then
        target = txn.sf:url()
    end
    local lines = {
        "GET " .. question .. " HTTP/1.1",
        "host: netlimit",
        "connection: close",
        "x-forwarded-for: " .. txn.sf:src(),
        "x-forwarded-uri: " .. target,
        "x-forwarded-method: " .. txn.sf:method(),
        "x-forwarded-host: " .. (txn.sf:req_fhdr("host") or ""),
        -- For `key=api_key`:
        -- "x-api-key: " .. (txn.sf:req_fhdr("x-api-key") or ""),
    }
    for number, line in ipairs(lines) do
        lines[number] = line:gsub("[\r\n%z]", " ")
    end
    local socket, answer = core.tcp(), {}
    socket:settimeout(longest)
    -- the frontend of this name
    if socket:connect("abns@netlimit") and socket:send(table.concat(lines, "\r\n") .. "\r\n\r\n") then
        answer = read(socket:receive("*a") or "")
    end
    socket:close()
    return answer
end

-- Whether it is the limiter that has answered, and not HAProxy in its place.
local function is_answer(answer)
    local status, kind = answer.status or 0, (answer.headers or {})["content-type"]
    return (status >= 200 and status < 500) or (kind and kind[1] == "application/problem+json")
end

local function refuse(txn, status, answer)
    local reply = txn:reply({ status = status, body = answer.body })
    for _, name in ipairs({ "content-type", "retry-after", "ratelimit-policy", "ratelimit" }) do
        for _, value in pairs((answer.headers or {})[name] or {}) do
            reply:add_header(name, value)
        end
    end
    txn:done(reply)
end

local function pass(txn, headers)
    txn:set_var("txn.limit_passed", true)
    for name, variable in pairs({ ["ratelimit-policy"] = "txn.limit_policy", ["ratelimit"] = "txn.limit_left" }) do
        if headers[name] then
            txn:set_var(variable, headers[name][1])
        end
    end
end

core.register_action("netlimit", { "http-req" }, function(txn)
    if is_gone(txn) or not has_room(txn) then
        return -- haproxy.cfg denies it, as all that is not let pass here
    end
    local taken = take_place()
    local begun = now()
    local answer = ask(txn)
    while not is_answer(answer) do
        if txn.f:nbsrv("netlimit") == 0 and now() - answered > gone then
            give_back(taken)
            return open and pass(txn, {})
        elseif now() - begun > patience then
            give_back(taken)
            return -- a busy limiter is no reason to pass
        end
        core.msleep(100)
        answer = ask(txn)
    end
    give_back(taken)
    answered = now()
    local status = answer.status
    if status == 403 or status == 429 then
        return refuse(txn, status, answer)
    elseif status >= 400 and status < 500 then
        return refuse(txn, 400, answer) -- what the limiter cannot read
    elseif status < 300 then
        return pass(txn, answer.headers or {})
    end
    return open and pass(txn, {}) -- an error of the limiter's
end)
