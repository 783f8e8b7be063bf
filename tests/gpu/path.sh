# Sourced: the packages of $root as they are, without an installation, below $out/path.

mkdir -p "$out/path/eagle_chain"
for package in engines export runtime; do
  ln -sfn "$root/$package" "$out/path/eagle_chain/$package"
done
