"""What people look at: pictures, numbers and words about patterns, builds and measurements."""
