"""The only package that imports SGLang's runtime: observe, decide, apply."""
