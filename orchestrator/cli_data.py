"""`raysume data`: makes token datasets, and audits what a Run made of one. The work is done in workers.prepare."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from orchestrator.cli_data_audit import AUDIT_EPILOG, audit
from orchestrator.exit_codes import ExitCode

__all__ = ["data"]

data = typer.Typer(
    name="data",
    help="Make token datasets, and prove which samples a run was trained on.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_PREPARE_EPILOG = """[bold]Examples[/bold]

  raysume data prepare stdlib ./outputs/data/stdlib-2048 --sequence-length 128 --vocab-size 2048

  raysume data prepare ./corpus s3://bucket/tokens --sequence-length 2048 --vocab-size 32000
"""


@data.command(epilog=_PREPARE_EPILOG)
def prepare(
    source: Annotated[
        str, typer.Argument(help="'stdlib', or a file or folder of text, JSONL, Parquet or source code.")
    ],
    url: Annotated[str, typer.Argument(help="Directory or URL that will hold the dataset.")],
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sample.")],
    vocab_size: Annotated[int, typer.Option(min=257, help="Size of the byte-level BPE vocabulary.")] = 2048,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Stop after this many bytes of text.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split and of the sample order.")] = 0,
    validation_fraction: Annotated[float, typer.Option(min=0.0, max=0.5, help="Part held out.")] = 0.01,
    data_format: Annotated[
        Literal["parquet", "arrow"], typer.Option("--format", help="Compressed, or read with nothing to undo.")
    ] = "parquet",
    tokenizer: Annotated[
        str | None, typer.Option(help="Dataset or file whose tokenizer is taken, e.g. for sources of one mix.")
    ] = None,
) -> None:
    """Train a tokenizer on SOURCE or take one, encode and pack the text, and write the dataset to URL."""
    from storage.errors import StorageError
    from workers.data_errors import DataError

    try:
        _prepare(
            source,
            url,
            sequence_length=sequence_length,
            vocab_size=vocab_size,
            max_bytes=max_bytes,
            seed=seed,
            validation_fraction=validation_fraction,
            data_format=data_format,
            tokenizer_of=tokenizer,
        )
    except (DataError, StorageError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ExitCode.CONFIG_ERROR) from None
    except KeyboardInterrupt:
        typer.echo("stopped; the dataset is incomplete: run the same command again", err=True)
        raise typer.Exit(ExitCode.STOPPED) from None


data.command("audit", epilog=AUDIT_EPILOG)(audit)


def _prepare(source: str, url: str, **settings: Any) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    from workers.prepare import prepare_dataset

    titles = {"tokenizer": "training the tokenizer", "encode": "encoding"}
    columns = (TextColumn("{task.description:<24}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {stage: bars.add_task(title, total=None, start=False) for stage, title in titles.items()}

        def show(stage: str, done: int, expected: int) -> None:
            task = tasks[stage]
            bars.start_task(task)
            bars.update(task, completed=done, total=expected)

        card = prepare_dataset(source, url, progress=show, **settings)
    typer.echo(f"{url}: dataset ready, fingerprint {card.fingerprint}")
