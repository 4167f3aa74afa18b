"""What every section of the run file shares: strictness, and the marks that fields carry."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.types import JsonValue
from pydantic_core import PydanticCustomError

PathKind = Literal["path", "model", "checkpoint"]
"""`path`: a file, folder or glob. `model`: a folder, or a name on the model hub when there is no such folder.
`checkpoint`: a folder, or one of the words `auto` and `never`."""


class Section(BaseModel):
    """One section of the run file: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    shorthand: ClassVar[str | None] = None
    """The field that a bare value stands for, e.g. `path` when a source is written as a plain string."""

    @model_validator(mode="before")
    @classmethod
    def _null_means_the_derived_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None or not cls._is_derived(name)}

    def chose(self, name: str) -> bool:
        """Whether somebody chose a key's value: it is not the default, or is written in a file that does not write all.

        A resolved run file, and a configuration made from another one, hold every key; those values were not chosen.
        """
        keys, written = type(self).model_fields, self.model_fields_set
        if getattr(self, name) != keys[name].get_default():
            return True
        return name in written and any(key not in written for key in keys if not self._is_derived(key))

    @classmethod
    def _is_derived(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and isinstance(field.json_schema_extra, dict) and "derived" in field.json_schema_extra

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # Pydantic reads `seq_len: true` as 1.
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if not accepts(annotation, bool):
                raise ValueError("a truth value")
        return value


def accepts(annotation: Any, kind: type) -> bool:
    """Whether `kind` is the annotation or stands anywhere in its union or its parameters."""
    return annotation is kind or any(accepts(part, kind) for part in get_args(annotation))


def marks(
    *,
    identity: bool = False,
    path: PathKind | None = None,
    allowed: str | None = None,
    derived: str | None = None,
) -> dict[str, JsonValue]:
    """Marks for `Field(json_schema_extra=...)`.

    identity: another value makes it another training (a resume with a changed one is refused).
    path:     relative values are resolved against the run file's folder (the current one on the command line).
    allowed:  what may be written, where types and limits do not say it.
    derived:  the default in words, where another key gives it; `null` then asks for that default.
    """
    found: dict[str, JsonValue] = {"identity": identity, "path": path, "allowed": allowed, "derived": derived}
    return {name: value for name, value in found.items() if value}


def fault(key: str, message: str) -> PydanticCustomError:
    """An error between several keys; `key` (dotted, from the top) is the one whose line is named."""
    return PydanticCustomError("between_keys", "{message}", {"key": key, "message": message})
