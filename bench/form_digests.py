"""Compare the bits of every stored form with another machine's: `python bench/form_digests.py [FILE]`.

It prints JSON: the digest of `convoy doctor`, the instruction set, and for each form two digests over two
small matrices, of their values and of exact linears over them. With a FILE of such JSON it names what differs
and ends with 1.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path

import torch

from convoy.config.kernels import KEPT_FORMS
from convoy.model.backends.host.checks.bits import bits_digest, check_numbers
from convoy.model.kernels.native.library import native_libraries
from convoy.model.kernels.stored.linear import stored_linear
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.packed import failing_forms
from convoy.model.kernels.stored.sample import sample_range, usual_shape

# Two parts, and two runs.
WIDTHS = (256, 2048)
OUTPUTS, ROW_COUNTS = 70, (1, 6, 40)


def form_digests(form: str) -> dict[str, str]:
    """Return the digest of a form's values, and that of linears over them."""
    values, sums = hashlib.sha256(), hashlib.sha256()
    for width in WIDTHS:
        one = sample_range(usual_shape(form, width), OUTPUTS)
        values.update(one.unpack().numpy().tobytes())
        linear = stored_linear(StoredMatrix((one,)), check_numbers("bias", OUTPUTS))
        x = check_numbers("rows", max(ROW_COUNTS), width)
        for count in ROW_COUNTS:
            sums.update(linear(x[:count]).contiguous().numpy().tobytes())
    return {"values": values.hexdigest()[:16], "linears": sums.hexdigest()[:16]}


def main() -> int:
    """Print the digests, or compare them. Returns the exit status."""
    torch.set_num_threads(1)
    sets = [library.instruction_set.name for library in native_libraries()]
    forms = {form: form_digests(form) for form in sorted(KEPT_FORMS)}
    found = {"bits": bits_digest(), "forms": forms}
    if len(sys.argv) > 1:
        other = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        different = [form for form in forms if other["forms"].get(form) != forms[form]]
        different += ["bits"] if other["bits"] != found["bits"] else []
        said = different or [f"equal on {', '.join(sets)}: bits and {len(forms)} forms"]
        sys.stdout.write("\n".join(said) + "\n")
        return bool(different)
    about: dict[str, object] = {
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "instruction_sets": sets,
    }
    about["failing"] = failing_forms()
    sys.stdout.write(json.dumps(about | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
