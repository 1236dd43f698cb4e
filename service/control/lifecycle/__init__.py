"""A job's life: states, the policies that decide, and the controller that acts."""
