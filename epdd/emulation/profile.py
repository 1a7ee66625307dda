"""A profile file: one fleet with its time models, and the sizes of the model that it serves."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from epdd.emulated_time import EmulatedModel, EncoderGroup, PrefillDecodeGroup, SpeedScale
from epdd.errors import ConfigError

SHIPPED = Path(__file__).parent / "profiles"


class Profile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of the file; `xeon6747p-5xl40s.toml` explains each field."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,40}$")]
    about: Annotated[str, Meta(pattern=r"^[^\n]{1,200}$")]      # one line
    answers: Literal["rows", "demo"]
    scale: SpeedScale = 1.0
    seed: int = 0
    model: EmulatedModel | None = None
    encoder: Annotated[tuple[EncoderGroup, ...], Meta(min_length=1)]
    pd: Annotated[tuple[PrefillDecodeGroup, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if (self.model is None) is (self.answers == "rows"):
            raise ValueError('[model] is needed with answers = "rows", and only there: the demo model has its own')


def names() -> list[str]:
    """Names of the profiles that ship with epdd."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read(name_or_path: str) -> Profile:
    """A shipped profile by its name, or another one by its file.  Raises ConfigError naming file and field."""
    path = SHIPPED / f"{name_or_path}.toml" if name_or_path in names() else Path(name_or_path)
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Profile)
    except FileNotFoundError:
        raise ConfigError(f"emulation.profile: no file {name_or_path}, and no profile of that name: "
                          f"there are {', '.join(names())}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = where.strip("`").lstrip(".")
        raise ConfigError(f"{path}: {f'{field}: ' if field else ''}{what}") from None
