"""Attention backends of SGLang that read a shared prefix once: they call `ops`."""
