/// Sees operations as they run, for profiles. The tape tells no time: who watches does.
pub trait Observer: Send + Sync {
    /// An operation's forward pass ended. It began when the operation before it ended, or later.
    fn forward(&self, name: &'static str, scope: usize);

    /// An operation's backward pass begins; a block that runs again does so inside its own.
    fn backward_begins(&self, name: &'static str, scope: usize);

    /// And ends.
    fn backward_ends(&self, name: &'static str, scope: usize);
}
