"""Files that are replaced whole.

Its own file because answers, profiles, caches and the reports of grids need the same promise, and some of their
commands load nothing else: whoever reads such a file, at any time, finds all of the old text or all of the new one.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(file: Path, text: str) -> None:
    """Replace `file` in one step by `text`; links stay. Raises OSError naming the file, which is as before then."""
    target = file.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from None
