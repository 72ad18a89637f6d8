"""For packages that add commands to `sonicmoe`, in the group of entry points `sonicmoe.commands`.

An entry point is a function that gets argparse's subparsers. Each parser that it adds sets `run` to
a function of the parsed arguments, which returns the exit status. A ValueError becomes one line.
"""

from .errors import bad_argument
from .extras import need
from .tools.tables import table
from .validation import check_writable

__all__ = ["bad_argument", "check_writable", "need", "table"]
