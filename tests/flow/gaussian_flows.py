"""1-D flows from N(0, 1) whose velocities are affine in x, a(t) x + b(t): Gaussian endpoints and exact regressions.

An affine velocity is a table `(T, 2)` of (a, b) at `TIMES`, float64.
"""

import numpy as np
import torch

NUM_STEPS = 64  # even
TIMES = torch.linspace(0, 1, NUM_STEPS + 1, dtype=torch.float64)

# Gauss-Hermite: exact for the moments up to order 7 of each of two independent normal numbers
_nodes, _weights = (torch.tensor(values) for values in np.polynomial.hermite_e.hermegauss(4))
Z_CLEAN, Z_NOISE = (z.flatten() for z in torch.meshgrid(_nodes, _nodes, indexing="ij"))
WEIGHTS = (_weights[:, None] * _weights).flatten() / _weights.sum() ** 2


def data_velocity(mean, var):
    """E[eps - x0 | x_t] for data N(mean, var)."""
    slope = (TIMES - (1 - TIMES) * var) / ((1 - TIMES) ** 2 * var + TIMES**2)
    return torch.stack([slope, -mean - slope * (1 - TIMES) * mean], 1)


def at(velocity, x):
    """Velocities at `x (T, Q)`."""
    return velocity[:, :1] * x + velocity[:, 1:]


def endpoint_law(velocity):
    """Mean and variance at t = 0, by the Runge-Kutta method of order 4 on the affine map (q, p): x = p eps + q."""
    a, b = velocity.T.tolist()
    step, p, q = 2 / NUM_STEPS, 1.0, 0.0
    for k in range(NUM_STEPS, 0, -2):
        change_p = change_q = slope_p = slope_q = 0.0
        for index, shift, weight in ((k, 0.0, 1), (k - 1, 0.5, 2), (k - 1, 0.5, 2), (k - 2, 1.0, 1)):
            here_p, here_q = p - shift * step * slope_p, q - shift * step * slope_q
            slope_p, slope_q = a[index] * here_p, a[index] * here_q + b[index]
            change_p, change_q = change_p + weight * slope_p / 6, change_q + weight * slope_q / 6
        p, q = p - step * change_p, q - step * change_q
    return q, p * p


def draws(mean, var):
    """Quadrature nodes `(T, Q)` of clean ~ N(mean, var), noise ~ N(0, 1) and x at each time."""
    clean, noise = torch.broadcast_tensors(mean + var**0.5 * Z_CLEAN, Z_NOISE)
    clean, noise = clean.expand(len(TIMES), -1), noise.expand(len(TIMES), -1)
    t = TIMES[:, None]
    return clean, noise, (1 - t) * clean + t * noise


def regress(x, target):
    """The affine velocity with the least mean square distance to `target`, at each time."""
    mean_x, mean_y = x @ WEIGHTS, target @ WEIGHTS
    slope = ((x * target) @ WEIGHTS - mean_x * mean_y) / (x.square() @ WEIGHTS - mean_x.square())
    return torch.stack([slope, mean_y - slope * mean_x], 1)


def iterate(velocity, update, *, share=1.0, iterations=400, tolerance=1e-9):
    """Moves `velocity` by a `share` of the way to `update(velocity, mean, var)` until it stays.

    Returns the law of its endpoints, or None where it diverges or has not settled.
    """
    for _ in range(iterations):
        mean, var = endpoint_law(velocity)
        if not (abs(mean) < 1e3 and var < 1e3):
            return None
        change = update(velocity, mean, var) - velocity
        if change.abs().max() < tolerance:
            return mean, var
        velocity = velocity + share * change
    return None
