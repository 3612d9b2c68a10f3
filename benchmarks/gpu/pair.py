"""timeline.py, the loads of latency.py and sessions.py with the same pair of replicas.

    python benchmarks/gpu/pair.py --model MODEL [--same-gpu] [--engine JSON] [--json PATH]
                                  [the options of the three]

Saves the start of engines. A 27B hybrid in fp8 on one H200 takes about five minutes with
--sessions 32768x5 --group 1 --no-decode: one for the start, 1.3 for the timelines, one for 20
loads, 1.2 for the sessions.
"""

import latency
import sessions
import timeline
from runs import Bench, Clock, Prompts, Results, counts, parser, running_pair


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    timeline.add_options(made)
    latency.add_options(made)
    sessions.add_options(made)
    made.set_defaults(stores=0)
    asked = made.parse_args()
    if asked.stores:
        made.error("--stores needs an engine without a connector: latency.py has one")
    prompts, results = Prompts(asked.seed, asked.token_ids), Results(asked)
    clock = Clock(sessions.expected_s(asked) + latency.expected_s(asked) + 80)
    longest = max(
        timeline.longest(asked), asked.length + latency.STREAM_TOKENS_MAX, sessions.longest(asked)
    )
    with running_pair(asked, longest, prompts, results) as (a, b, pool):
        timeline.run(asked, (a, b), pool, prompts, results)
        latency.measure(Bench(a, b, pool, prompts, results, clock, asked))
        talks = sessions.Talks(a, b, pool, prompts, results, clock, asked)
        for length, number in counts(asked.sessions).items():
            sessions.run_length(talks, length, number)
    results.finish()


if __name__ == "__main__":
    main()
