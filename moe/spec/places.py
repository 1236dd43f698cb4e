"""Names of users' files, and of columns in them."""

from typing import Annotated

from pydantic import Field

from moe.spec.base import Text

MAX_PLACES = 1000
"""Most files or patterns, or languages, of a corpus; each is looked up when a job is posted."""
Place = Annotated[Text, Field(max_length=4096)]
Column = Annotated[Text, Field(max_length=256)]
