"""Text of tokens as they come: whole characters only, and up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character yet."""


class TextStream:
    """The text of one request. Its cost per token does not grow with the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()):
        self.text = ""
        """So far, without characters that are not complete and without what follows a stop string."""
        self.stopped = False
        """Whether a stop string came; nothing is added after it."""
        self._tokenizer, self._stops = tokenizer, stop_strings
        self._longest = max(map(len, stop_strings), default=1)
        # Tokens since the last two whole pieces of text: a tokenizer may put a space where it sees no token before.
        self._context: list[int] = []
        self._new: list[int] = []
        self._taken = 0
        self._over = False

    def push(self, token: int) -> bool:
        """Adds a token. Returns whether a stop string is complete."""
        self._new.append(token)
        piece = self._pending()
        if piece and not piece.endswith(_INCOMPLETE):
            self._append(piece)
        return self.stopped

    def finish(self) -> None:
        """No token follows: bytes that are no whole character count as they are."""
        if self._new and not self.stopped:
            self._append(self._pending())
        self._over = True

    def take(self) -> str:
        """The text since the last call, without an end that may still become a stop string."""
        end = len(self.text) - (0 if self._over or self.stopped else self._held())
        piece = self.text[self._taken : end]
        self._taken += len(piece)
        return piece

    def _pending(self) -> str:
        decode = lambda tokens: str(self._tokenizer.decode(tokens))
        return decode(self._context + self._new)[len(decode(self._context)) :]

    def _append(self, piece: str) -> None:
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        self._context, self._new = self._new, []
        found = [at for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """How many characters at the end begin a stop string."""
        lengths = range(min(self._longest - 1, len(self.text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self.text[-n:]) for stop in self._stops)), 0)
