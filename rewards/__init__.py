"""Rewards that can be named in a config; `flowrl rewards` lists them."""

if __name__ != "flowrl.rewards":
    raise ImportError("import this package as `flowrl.rewards`, not as the top-level name `rewards`")
