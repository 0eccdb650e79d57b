"""Adapters of diffusers pipelines, one file for each model family."""

if __name__ != "flowrl.pipelines":
    raise ImportError("import this package as `flowrl.pipelines`, not as the top-level name `pipelines`")
