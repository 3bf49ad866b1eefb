"""The paper's tables and figures, drawn from the records of experiments beside the paper's own values."""
