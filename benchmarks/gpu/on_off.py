"""cold.py and latency.py with the same two engines, which saves their start.

    python benchmarks/gpu/on_off.py --model MODEL [--engine JSON] [--json PATH]
                                    [the options of both]

First the tokens of another request beside loads and stores, then exact multiples, cold prefill
and diverging hits. A 27B hybrid in fp8 on one H200 takes about fifteen minutes, of which 256k
are four and a half (--lengths 32768x5,131072x5 leaves them out).
"""

import cold
import latency
from runs import on_and_off, parser


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    cold.add_options(made)
    latency.add_options(made)
    asked = made.parse_args()
    longest = max(cold.longest(asked), asked.length + latency.STREAM_TOKENS_MAX)
    expected_s = cold.expected_s(asked) + latency.expected_s(asked)
    with on_and_off(asked, longest=longest, expected_s=expected_s) as bench:
        latency.measure(bench)
        cold.measure(bench)


if __name__ == "__main__":
    main()
