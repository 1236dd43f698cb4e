"""SHA-256 digests of what the product computes and answers: equal at two commits where nothing has changed.

    python -m benchmarks.digests [--quick] [--only SECTION ...] [--out FILE] [--contents FOLDER]
    python -m benchmarks.digests --compare BEFORE AFTER [--tolerance 1e-10] [--contents FOLDER_BEFORE FOLDER_AFTER]

An item is a name with a content; its digest is of the content as canonical JSON. Sections: `trajectories`, `decoding`,
`plans`, `schema`, `answers`. Digests are comparable on one machine alone: another processor or torch rounds otherwise.

An older commit is compared by copying this folder into its checkout: it uses the tests' own harness (`tests.parity`,
`tests.service.control_plane`), HTTP, specs as JSON, and names of packages' public surfaces.
"""
