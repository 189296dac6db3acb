"""Perplexity with INT8 weights against floats: `python -m benchmarks.perplexity --out FILE`.

The text is the Jargon File (public domain) from Debian's package jargon-text, which `apt-get` downloads,
its wrapped lines joined to paragraphs. The default model is measured, or the one of --model, through
`photoninfer perplexity`; windows do not overlap. What FILE holds already is not measured again.
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WINDOW = 1024
RUNS = {
    "floats": [],
    **{
        f"int8 group {size}": ["--quantization", "int8", "--group-size", str(size)]
        for size in (32, 64, 128)
    },
}


def jargon_file(folder: Path) -> str:
    """Paragraphs of prose."""
    subprocess.run(["apt-get", "download", "-qq", "jargon-text"], cwd=folder, check=True)  # noqa: S607
    package = next(folder.glob("jargon-text_*.deb"))
    subprocess.run(["dpkg-deb", "-x", package.name, "content"], cwd=folder, check=True)  # noqa: S603, S607
    text = gzip.decompress((folder / "content/usr/share/doc/jargon-text/jargon.txt.gz").read_bytes())
    paragraphs = re.split(r"\n\s*\n", text.decode("utf-8", errors="replace"))
    joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
    prose = [each for each in joined if len(each) > 200 and each[-1] in ".!?\"')"]
    return "\n\n".join(prose)


def measure(text: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "service", "perplexity", "--text", str(text), *options]
    command += ["--window", str(WINDOW), "--stride", str(WINDOW)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603  our own command
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/perplexity-int8.json"))
    parser.add_argument("--text", type=Path, help="another text, or the Jargon File made before")
    parser.add_argument("--chars", type=int, default=260_000, help="of the text, from its start")
    options, more = parser.parse_known_args()
    results = json.loads(options.out.read_text()) if options.out.is_file() else {}
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.txt"
        source = options.text.read_text() if options.text else jargon_file(Path(name))
        text.write_text(source[: options.chars])
        for run, flags in RUNS.items():
            if run not in results:
                results[run] = measure(text, [*flags, *more])
                results[run]["model"] = Path(results[run]["model"]).name
                base = results["floats"]["perplexity"]
                results[run]["increase_percent"] = 100 * (results[run]["perplexity"] / base - 1)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(results, indent=1) + "\n")
                print(run, results[run], flush=True)


if __name__ == "__main__":
    main()
