"""Configs that come with flowrl: `flowrl train NAME`."""
