"""The tests mirror the packages.

Under `python -O` they must still be able to fail. pytest keeps the asserts of the modules that it collects; this keeps
those of all the others here, also in the processes of ranks, where there is no pytest.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


class _KeepingAsserts(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=0)
        return code


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("tests.") else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _KeepingAsserts(spec.loader.name, spec.loader.path)
        return spec


if not __debug__:
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder)
