"""Makes strided copy programs of requests, with their checksums and a numpy executor; knows no transport."""

# numpy.unique imports it on its first call, which must not be during a copy, when no descriptor may be left
import numpy.ma  # noqa: F401
