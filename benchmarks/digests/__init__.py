"""SHA-256 digests of computations and answers of the product, which two commits without a change share.

    python -m benchmarks.digests [--quick] [--only SECTION ...] [--out FILE] [--contents FOLDER]
    python -m benchmarks.digests --compare BEFORE AFTER [--tolerance 1e-10] [--contents FOLDER_BEFORE FOLDER_AFTER]

An item is a name with a content; its digest is of the content as canonical JSON. Sections: `trajectories`, `decoding`,
`plans`, `schema`, `answers`. Compare digests of one machine only: other processors and torch versions round
differently.

To compare an older commit, copy this folder into its checkout: it relies on the tests' harness (`tests.parity`,
`tests.service.control_plane`), HTTP, specs as JSON, and public names of packages.
"""
