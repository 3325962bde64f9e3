-- For haproxy.cfg: asks netlimit whether a request may pass.
local question = "http://netlimit/v1/auth?domain=web&key=remote_address&key=remote_address,path&deny=429"
local longest = 35000 -- milliseconds: more than the longest `max_wait` of a rule

core.register_action("netlimit", { "http-req" }, function(txn)
    local answer = core.httpclient():get({
        url = question,
        dst = "abns@netlimit", -- the frontend of this name
        timeout = longest,
        headers = {
            ["x-forwarded-for"] = { txn.sf:src() },
            ["x-forwarded-uri"] = { txn.sf:pathq() },
            ["x-forwarded-method"] = { txn.sf:method() },
            ["x-forwarded-host"] = { txn.sf:req_fhdr("host") or "" },
        },
    })
    local headers = answer.headers or {}
    if answer.status == 429 then
        local reply = txn:reply({ status = 429, body = answer.body })
        for _, name in ipairs({ "content-type", "retry-after", "ratelimit-policy", "ratelimit" }) do
            for _, value in pairs(headers[name] or {}) do
                reply:add_header(name, value)
            end
        end
        txn:done(reply)
    end
    -- Anything else passes: without the limiter, everything.
    for name, variable in pairs({ ["ratelimit-policy"] = "txn.limit_policy", ["ratelimit"] = "txn.limit_left" }) do
        if headers[name] then
            txn:set_var(variable, headers[name][0])
        end
    end
end)
