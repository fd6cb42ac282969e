"""`sglang-taper demo`: a forking program and three policies on one live server.

`run` plays it; `server` starts and ends the server; `program` is the forking program;
`load` the mix that every policy gets; `steps` and `score` turn what server and client
saw into facts; `display` and `table` show them. Nothing here knows the engine.
"""
