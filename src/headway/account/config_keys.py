"""Reading a Hugging Face `config.json` key by key: every number checked, every error names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.account.errors import UserError


class Keys:
    """One model type's config with the defaults its class fills in. `null` counts as written, as it does there."""

    def __init__(
        self,
        config: Mapping[str, Any],
        model_type: str,
        defaults: Mapping[str, Any],
        aliases: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._config = config
        self._defaults = defaults
        self._aliases = aliases
        self.model_type = model_type

    def raw(self, key: str) -> Any:
        """The value under the first of the key's names that has one, the class's default, or None."""
        written = [self._config[name] for name in self._names(key) if name in self._config]
        return next((value for value in written if value is not None), None if written else self._defaults.get(key))

    def number(self, key: str, minimum: int = 1) -> int:
        """A whole number >= minimum; UserError when the key is missing, null, or anything else."""
        value = self.optional(key, minimum)
        if value is None:
            raise UserError(f"config.json ({self.model_type}): key {self.name(key)!r} is missing; the size needs it")
        return value

    def optional(self, key: str, minimum: int = 1) -> int | None:
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise UserError(
                f"config.json ({self.model_type}): key {self.name(key)!r} is {value!r}; "
                f"give a whole number of at least {minimum}"
            )
        return value

    def flag(self, key: bool | str) -> bool:
        """A trait that is fixed for the family (a bool) or decided by a config key (its name)."""
        if isinstance(key, bool):
            return key
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"config.json ({self.model_type}): key {self.name(key)!r} is {value!r}; give true or false")
        return bool(value)

    def listing(self, key: str) -> list[Any] | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, (list, tuple)):
            raise UserError(f"config.json ({self.model_type}): key {self.name(key)!r} is {value!r}; give a list")
        return None if value is None else list(value)

    def name(self, key: str) -> str:
        """What the family's own files call the key."""
        return self._names(key)[-1]

    def _names(self, key: str) -> tuple[str, ...]:
        return self._aliases.get(key, (key,))
