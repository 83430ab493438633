"""The seam to torch: every private name of torch that Maya reads or replaces, by subject, with the versions that have it.

Other rooms say what they want to happen and name nothing of torch that starts with an underscore; `tests/torch_seam` keeps it so.
The C++ counterparts are device/native/torch_abi.h and torch_version.h. To support another version of torch, run `make test-torch TORCH=...`
and mend what it reports here and there.
"""
