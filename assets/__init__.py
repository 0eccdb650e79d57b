"""Models and prompt files that come with flowrl."""
