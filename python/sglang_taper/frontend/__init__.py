"""Clients of a server that regulates branches: `sglang.lang` and plain HTTP.

`endpoint` needs `sglang.lang`, `client` only httpx; neither knows the engine, and
both also work against a stock SGLang server, which ignores the metadata.
"""
