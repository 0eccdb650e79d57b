import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from flowrl.flow.paths import predict_clean, predict_ends, predict_noise

SIGMAS = torch.tensor([0.05, 0.3, 0.6, 0.95])
ALPHAS = {"rectified": 1 - SIGMAS, "variance_preserving": (1 - SIGMAS**2).sqrt()}


def outputs(alpha, sigma, x0, eps):
    """What a perfect network of each kind says."""
    return {"velocity": eps - x0, "epsilon": eps, "sample": x0, "v_prediction": alpha * eps - sigma * x0}


KNOWN = [(path, prediction) for path in ALPHAS for prediction in ("velocity", "epsilon", "sample")]
KNOWN.append(("variance_preserving", "v_prediction"))


@pytest.mark.parametrize(("path", "prediction"), KNOWN)
def test_ends_come_back_from_a_perfect_output(path, prediction):
    x0, eps = torch.randn(2, 4, 3, 2).unbind(0)
    alpha, sigma = ALPHAS[path][:, None, None], SIGMAS[:, None, None]
    output = outputs(alpha, sigma, x0, eps)[prediction]
    clean, noise = predict_ends(alpha * x0 + sigma * eps, output, SIGMAS, path=path, prediction=prediction)
    torch.testing.assert_close(clean, x0, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(noise, eps, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("path", "prediction"), KNOWN)
def test_ends_of_any_output_lie_on_the_path_through_x(path, prediction):
    x, output = torch.randn(2, 4, 3).unbind(0)
    clean, noise = predict_ends(x, output, SIGMAS, path=path, prediction=prediction)
    alpha, sigma = ALPHAS[path][:, None], SIGMAS[:, None]
    torch.testing.assert_close(alpha * clean + sigma * noise, x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs(alpha, sigma, clean, noise)[prediction], output, atol=2e-5, rtol=1e-5)


def test_rectified_velocity_is_the_default_and_has_its_own_functions():
    x, v = torch.randn(2, 4, 3).unbind(0)
    clean, noise = predict_ends(x, v, SIGMAS)
    torch.testing.assert_close(predict_clean(x, v, SIGMAS), clean)
    torch.testing.assert_close(predict_noise(x, v, SIGMAS), noise)
    # by hand: x = 1, v = 2, sigma 0.3: x0 = 1 - 0.6, eps = 1 + 0.7 * 2
    clean, noise = predict_ends(torch.ones(1, 1), torch.full((1, 1), 2.0), torch.tensor([0.3]))
    assert (clean.item(), noise.item()) == pytest.approx((0.4, 2.4))


def test_half_precision_is_computed_in_float32():
    x, output = torch.randn(2, 4, 3).bfloat16().unbind(0)
    for path, prediction in KNOWN:  # also what is handed through
        for found in predict_ends(x, output, SIGMAS, path=path, prediction=prediction):
            assert found.dtype == torch.float32
    for found in (predict_clean(x, output, SIGMAS), predict_noise(x, output, SIGMAS)):
        assert found.dtype == torch.float32
    torch.testing.assert_close(predict_clean(x, output, SIGMAS), x.float() - SIGMAS[:, None] * output.float())


def stable_diffusion(kind, prediction="epsilon"):
    options = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "clip_sample": False}
    return kind(**options, prediction_type=prediction)


@pytest.mark.parametrize("timestep", [1, 250, 600, 999])
def test_ends_agree_with_the_noising_of_diffusers(timestep):
    scheduler = stable_diffusion(DDPMScheduler)
    x0, eps = torch.randn(2, 3, 5).unbind(0)
    timesteps = torch.full((3,), timestep)
    x, v = scheduler.add_noise(x0, eps, timesteps), scheduler.get_velocity(x0, eps, timesteps)
    sigma = (1 - scheduler.alphas_cumprod[timesteps]).sqrt()
    for prediction, output in (("epsilon", eps), ("v_prediction", v), ("sample", x0), ("velocity", eps - x0)):
        clean, noise = predict_ends(x, output, sigma, path="variance_preserving", prediction=prediction)
        torch.testing.assert_close(clean, x0, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(noise, eps, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("timestep", [1, 501, 901])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_the_clean_sample_is_what_diffusers_reads_from_any_output(timestep, prediction):
    scheduler = stable_diffusion(DDIMScheduler, prediction)
    scheduler.set_timesteps(10)
    x, output = torch.randn(2, 3, 5).unbind(0)
    expected = scheduler.step(output, timestep, x).pred_original_sample
    sigma = (1 - scheduler.alphas_cumprod[timestep]).sqrt().expand(3)
    clean, _ = predict_ends(x, output, sigma, path="variance_preserving", prediction=prediction)
    torch.testing.assert_close(clean, expected, atol=1e-4, rtol=1e-4)


def test_unknown_names_are_refused_with_a_suggestion():
    x, sigma = torch.zeros(1, 2), torch.tensor([0.5])
    with pytest.raises(ValueError, match="unknown path 'rectifed'; did you mean 'rectified'"):
        predict_ends(x, x, sigma, path="rectifed")
    with pytest.raises(ValueError, match="unknown prediction 'epsilo'; did you mean 'epsilon'"):
        predict_ends(x, x, sigma, prediction="epsilo")
    with pytest.raises(ValueError, match="v_prediction exists on the variance_preserving path only"):
        predict_ends(x, x, sigma, prediction="v_prediction")


def test_one_sigma_for_each_row():
    with pytest.raises(ValueError, match="one value for each of 3 rows"):
        predict_ends(torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor([0.5]))
