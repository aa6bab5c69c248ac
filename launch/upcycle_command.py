"""The `upcycle` command: options to `moe.upcycle` and its result to one line of text.

A file of its own because the command runs in one process, without ranks, and is imported only when it is called.
"""

from pathlib import Path

import click

from moe.dense import UpcycleError
from moe.upcycle import DTYPES, UpcycleOptions, upcycle


@click.command("upcycle")
@click.option("--model", "source", required=True, type=click.Path(path_type=Path), metavar="SRC",
              help="Dense LLaMA-family checkpoint: a directory with safetensors, or a GGUF file.")  # fmt: skip
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR",
              help="Directory of the mixture of experts.")  # fmt: skip
@click.option("--experts", default=8, show_default=True, help="Experts in each layer.")
@click.option("--top-k", default=2, show_default=True, help="Experts per token.")
@click.option("--noise", default=0.0, show_default=True,
              help="Perturb each expert by this share of its weights' rms; 0 keeps the source's function.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of the random router and of the noise.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", *DTYPES]),
              help="auto keeps the dtype of safetensors and makes float32 of a GGUF.")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite a directory that this command did not make.")
def upcycle_command(
    source: Path, out: Path, experts: int, top_k: int, noise: float, seed: int, dtype: str, force: bool
) -> None:
    """Turn a dense LLaMA or Mistral checkpoint into a Mixtral-format mixture of experts.

    Experts are copies of the MLP under a random router, so without --noise the mixture computes what its source
    computes. Run again with the same options it finds its result and does nothing.
    """
    options = UpcycleOptions(num_experts=experts, num_topk=top_k, noise=noise, seed=seed, dtype=dtype)
    try:
        result = upcycle(source, out, options, force=force)
    except UpcycleError as error:
        raise click.ClickException(str(error)) from None
    state = "up to date" if result.up_to_date else "written"
    size = result.num_bytes / 2**30
    click.echo(f"{out}: {state}, {experts} experts, top-{top_k}, {size:.2f} GiB in {result.num_shards} files")
