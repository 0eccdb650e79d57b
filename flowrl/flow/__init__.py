"""Diffusion and flow-matching policies: transitions, step plans, rollouts, methods."""
