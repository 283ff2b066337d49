"""Optional capabilities, one folder each."""

# The schema imports the `keys` of extras, which import `Key` from the config package. Loading the
# schema first avoids a circular import when an extra is imported before anything else.
import jaxrl.config.schema  # noqa: F401
