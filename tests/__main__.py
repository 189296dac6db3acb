"""Every check, in the order of how soon it tells: `python -m tests [pytest arguments]`."""

import subprocess
import sys
import time

CHECKS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "imports": ["lint-imports"],
    "tests": ["pytest"],
}


def main() -> int:
    for name, (program, *arguments) in CHECKS.items():
        print(f"--- {name}", flush=True)
        started_at = time.monotonic()
        if program == "lint-imports":  # has no `python -m` of its own
            start = [
                "-c",
                "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()",
            ]
        else:
            start = ["-m", program]
        more = sys.argv[1:] if name == "tests" else []
        code = subprocess.run([sys.executable, *start, *arguments, *more], check=False).returncode
        if code:
            print(f"--- {name} failed", flush=True)
            return code
        print(f"--- {name}: {time.monotonic() - started_at:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
