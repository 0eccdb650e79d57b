"""The command line. Imports torch only in commands that compute."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flowrl import __distribution__, __version__
from flowrl.catalog import METHODS, REWARDS, method_deviations, method_notes, method_row
from flowrl.config import EvalSection, load_config, load_run_config
from flowrl.errors import ConfigError, FlowrlError, Interrupted
from flowrl.identity import conflicts
from flowrl.overrides import apply_overrides
from flowrl.preflight import check_files
from flowrl.registry import suggest
from flowrl.resume import resumed_config
from flowrl.section import expand_path
from flowrl.yaml_text import dump

app = typer.Typer(
    help="Aligns diffusion and flow-matching models with rewards.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file or a shipped config, then dotted overrides."),
]


def _split(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Config and overrides; the config is the one argument without "=", or the one that is a file."""
    names = [argument for argument in arguments or [] if "=" not in argument or _is_file(argument)]
    if len(names) > 1:
        raise ConfigError(f"expected one config, got {', '.join(names)}; overrides are written key=value")
    return (names[0] if names else None), [argument for argument in arguments or [] if argument not in names]


def _is_file(argument: str) -> bool:
    try:
        return os.path.isfile(expand_path(argument))
    except ConfigError:
        return False


def _expanded(path: Path | None) -> Path | None:
    return None if path is None else Path(expand_path(str(path)))


@app.command(context_settings=_PASS_ON)
def train(
    arguments: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(callback=_expanded, help="Go on with the run in this folder, perhaps with other overrides."),
    ] = None,
) -> None:
    """Train. Without arguments: Flow-GRPO on the shapes world, a few minutes on two CPU cores.

    Example: [bold]flowrl train my.yaml optimizer.learning_rate=1e-4 output_dir=runs/mine[/]

    Ctrl-C or SIGTERM stops where the run can go on, and saves it: [bold]flowrl train --resume runs/mine[/]
    """
    source, overrides = _split(arguments)
    if resume is not None and source is not None:
        raise ConfigError(f"--resume goes on with the run's own config; it takes overrides, but no config {source!r}")
    config = resumed_config(resume, overrides)[0] if resume is not None else load_config(source, overrides)
    check_files(config, resume=resume is not None)
    from flowrl.run import train as start

    try:
        start(config, overrides if resume is not None else (), resume=resume)
    except Interrupted as stop:
        raise SystemExit(128 + stop.signal) from None


@app.command("eval", context_settings=_PASS_ON)
def evaluate(
    run: Annotated[Path, typer.Argument(callback=_expanded, help="Folder of a run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields of the eval section.")
    ] = None,
    weights: Annotated[str, typer.Option(help="auto, raw, ema, or base (before training).")] = "auto",
) -> None:
    """Judge a run's model on its held-out prompts.

    Example: [bold]flowrl eval runs/shapes guidance_scale=2.5[/]
    """
    _choice("--weights", weights, ("auto", "raw", "ema", "base"))
    fields: dict[str, Any] = {}
    plain = [override.removeprefix("--").removeprefix("eval.") for override in overrides or []]
    apply_overrides(fields, plain, EvalSection)
    unknown = [key for key in fields if key not in EvalSection.model_fields]
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r}; {suggest(unknown[0], list(EvalSection.model_fields))}")
    from flowrl.build import evaluate as judge
    from flowrl.report.summary import subsets

    prompts, result = judge(run, weights=weights, **fields)
    table = Table("prompts", "n", *map(escape, result.names))
    for name, rows in subsets(prompts).items():
        means = result.table[rows].nanmean(0).tolist()
        table.add_row(escape(name), str(len(rows)), *(f"{mean:.3f}" for mean in means))
    Console().print(table)
    print(f"weights: {result.weights}; mean pixel distance within a prompt {result.diversity:.4f}")


@app.command()
def sample(
    prompts: Annotated[list[str], typer.Argument(help="One or several prompts.")],
    run: Annotated[
        Path | None, typer.Option(callback=_expanded, help="Folder of a run; default: the embedded shapes model.")
    ] = None,
    out: Annotated[Path, typer.Option(callback=_expanded, help="PNG file to write.")] = Path("samples.png"),
    num_images: Annotated[int, typer.Option(min=1, help="Images of each prompt.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Sampling steps.")] = 20,
    guidance_scale: Annotated[float, typer.Option(min=0, help="Classifier-free guidance; 1 is none.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    base: Annotated[bool, typer.Option(help="Use the model as it was before training.")] = False,
) -> None:
    """Draw images and write them as one grid.

    Example: [bold]flowrl sample "a red circle" "three squares" --run runs/shapes[/]
    """
    from flowrl.build import build_policy, load_policy
    from flowrl.core.prompts import PromptSet
    from flowrl.core.random import torch_generator
    from flowrl.flow.policy import to_pil
    from flowrl.report.figures import image_grid, save_atomically

    if run is None:
        policy = build_policy(load_config(), PromptSet([""], {}))
    else:
        policy, _ = load_policy(run, weights="base" if base else "auto")
    repeated = [prompt for prompt in prompts for _ in range(num_images)]
    noise = policy.noise([torch_generator(seed, "sample", index) for index in range(len(repeated))])
    images = policy.sample(repeated, noise, num_inference_steps=steps, guidance_scale=guidance_scale)
    save_atomically(image_grid(to_pil(images), repeated, columns=num_images), out)
    print(f"wrote {out}")


@app.command(context_settings=_PASS_ON)
def calibrate(
    arguments: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="At most so many rounds.")] = 40,
    step: Annotated[float, typer.Option(min=0.001, max=0.5, help="A noise level moves by this.")] = 0.01,
    tolerance: Annotated[int, typer.Option(min=1, help="Smaller differences of counts are balance.")] = 2,
    samples: Annotated[int | None, typer.Option(min=2, help="In each round; default: as in training.")] = None,
) -> None:
    """Find the noise level of each step (DenseGRPO): as high as improvements and damages balance.

    Each round prints the level of each step and how many samples its noise made better (+) and worse (-).

    Example: [bold]flowrl calibrate dense_grpo_shapes --rounds 20 --step 0.05[/]
    """
    config = load_config(*_split(arguments))
    check_files(config, writes=False)
    from flowrl.build import calibrate as run

    levels: tuple[float, ...] = ()
    number = 0
    for number, tried in enumerate(run(config, rounds=rounds, step=step, tolerance=tolerance, num_samples=samples)):
        levels = tried.levels
        steps = zip(tried.levels, tried.better, tried.worse, strict=True)
        row = "  ".join(f"{level:.2f} (+{better} -{worse})" for level, better, worse in steps)
        print(f"round {number + 1}: {row}", flush=True)
    settled = (
        "not every level has turned back yet: take more rounds" if number + 1 == rounds else "all have turned back"
    )
    print(f"ended after {number + 1} round(s); {settled}")
    rest = config.rollout.num_inference_steps - 1 - len(levels)
    print(f"method.noise_level=[{','.join(f'{level:g}' for level in (*levels, *levels[-1:] * rest))}]")


@app.command(context_settings=_PASS_ON)
def pairs(
    out: Annotated[Path, typer.Argument(callback=_expanded, help="New folder for images and pairs.jsonl.")],
    arguments: Overrides = None,
    run: Annotated[
        Path | None, typer.Option(callback=_expanded, help="Sample the model of this run; default: that of the config.")
    ] = None,
    num_pairs: Annotated[int, typer.Option(min=1, help="How many.")] = 2000,
    margin: Annotated[float, typer.Option(min=0, help="The rewards of a pair differ by more than this.")] = 0.0,
) -> None:
    """Build a preference set: the best and the worst of each group of samples, by the rewards of a config.

    Example: [bold]flowrl pairs runs/pairs default rewards.shapes_strict=1 --num-pairs 500[/]
    """
    if run is not None and arguments and _split(arguments)[0]:
        raise ConfigError("--run brings its own config; only overrides can be given besides")
    config = load_run_config(run, _split(arguments)[1]) if run is not None else load_config(*_split(arguments))
    check_files(config, writes=False)
    from flowrl.pair_building import write_pairs_of

    count = write_pairs_of(config, out, run=run, num_pairs=num_pairs, margin=margin)
    print(f"wrote {count} pairs to {out}; learn from them with data.pairs={out}")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Say all about this one.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As the table of docs/methods.md.")] = False,
) -> None:
    """List the methods that a config can name."""
    if name is not None:
        if name not in METHODS:
            raise ConfigError(f"unknown method {name!r}; {suggest(name, list(METHODS))}")
        row, method = method_row(name), METHODS.load(name)
        print(method_notes(name))
        print("\n" + "\n".join(f"{key}: {row[key]}" for key in ("parts", "NFE", "config") if row[key]))
        defaults = method().model_dump(mode="json", exclude={"name"})
        print("\ndefaults:\n" + dump(defaults, flow=None).rstrip())
        return
    rows = [method_row(name) for name in METHODS]
    if markdown:
        rows = [row | {"deviations": method_deviations(row["method"])} for row in rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row.values()) + " |" for row in rows]
        print("\n".join(["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|", *lines]))
        return
    wide = Console().width >= 120
    shown = [name for name in rows[0] if name != "parts" and (wide or name not in ("paper", "NFE"))]
    table = Table(caption="NFE of a sample in rollout + completions + update; `flowrl methods NAME` says more")
    for column in shown:
        table.add_column(column, no_wrap=column in ("method", "config"))
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    Console().print(table)


@app.command()
def rewards() -> None:
    """List the rewards that a config can name, and whether they work here."""
    from flowrl.rewards.base import reward_status

    table = Table("reward", "usable here", "what it says")
    for name in REWARDS:
        status = reward_status(name)
        doc = (REWARDS.load(name).__doc__ or "").strip().splitlines()[0] if status == "ok" else ""
        table.add_row(name, escape(status), doc)
    Console().print(table)
    print("Your own: name it 'package.module:attribute' in the config.")


@app.command()
def doctor() -> None:
    """Show versions, devices, and which rewards work here."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from flowrl.rewards.base import reward_status

    table = Table("what", "found", title=f"flowrl {__version__}")
    table.add_row("package", f"{__distribution__} in {Path(__file__).parent}")
    table.add_row("Python", sys.version.split()[0])
    for package in ("torch", "torchvision", "diffusers", "transformers", "accelerate", "peft", "tensorboard"):
        try:
            table.add_row(package, version(package))
        except PackageNotFoundError:
            table.add_row(package, "not installed")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    table.add_row("GPUs", ", ".join(gpus) or "none seen by torch")
    table.add_row("CPU threads", str(torch.get_num_threads()))
    for name in REWARDS:
        table.add_row(f"reward {name}", escape(reward_status(name)))
    Console().print(table)


@app.callback(invoke_without_command=True)
def _root(show_version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if show_version:
        print(f"flowrl {__version__}")
        raise typer.Exit


def _choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{option}={value}: expected one of {', '.join(known)}")


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the `flowrl` command."""
    for conflict in conflicts():
        Console(stderr=True).print(f"[bold yellow]warning[/] {escape(conflict)}", highlight=False, soft_wrap=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a character that the terminal does not have is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    sys.path.append(str(Path.cwd()))  # rewards of one's own may lie in the working folder
    try:
        return app(arguments)
    except (FlowrlError, OSError) as error:
        console = Console(stderr=True)
        console.print("error ", style="bold red", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
