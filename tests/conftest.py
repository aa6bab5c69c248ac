"""What every test may use."""

pytest_plugins = ["tests.demo_model", "tests.ranks"]
