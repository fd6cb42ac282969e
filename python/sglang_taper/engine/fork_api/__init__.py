"""`POST /fork`: one call that forks, over SGLang's own `generate_request`.

`schema` is the wire format, `prompts` finds out what the branches continue, `calls`
makes a request of SGLang for each, `running` merges their answers, `route` is the HTTP.
"""
