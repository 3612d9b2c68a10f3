"""Which replica a request goes to: one policy a file, without a clock, a socket or chance.

The router and a planner on virtual time drive the same code. docs/decisions/0006-router.md
says what each policy is for.
"""
