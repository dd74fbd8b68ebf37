"""The forms in which models call tools and think aloud: how each is recognized, demanded and read."""

from __future__ import annotations

from tricorn.frontend.parsers import hermes, llama3, mistral, plain
from tricorn.frontend.parsers.calls import Form

FORMS: tuple[Form, ...] = (mistral.NAMED, mistral.LIST, llama3.FORM, hermes.FORM)
"""Those that chat templates ask for; the first that fits counts."""


def form_of(template: str) -> Form:
    """The form that a chat template teaches its model, or the plain one, which needs none."""
    return next((form for form in FORMS if form.fits(template)), plain.FORM)
